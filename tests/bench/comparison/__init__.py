"""What `tests/bench/peers.py` is made of: workloads, environments, models, contestants, turns and the table."""
