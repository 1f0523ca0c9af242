#!/bin/sh
# drain SECONDS: tell Ray that this node is going, and wait until no Serve replica is left on it, SECONDS at most.
# The preStop hook of Ray's workers. Serve starts each replica elsewhere first, takes this node's proxy out of service,
# then stops the replica, whose sequences go on where they are sent. Never fails: the pod goes in any case.
seconds=${1:-120}
timeout 30 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod is to be deleted" \
    --deadline-remaining-seconds "$seconds" || exit 0
until=$(($(date +%s) + seconds))
while [ "$(date +%s)" -lt "$until" ] && grep -qs "^ray::ServeReplica" /proc/[0-9]*/cmdline; do
    sleep 1
done
