"""Log lines as JSON, one object a line, for whoever collects them: `observability.json_logs`.

Every line has `time`, `level`, `process`, `logger` and `message`; one about a request has `request_id` and `tenant`.
What a client sent can break no line: JSON escapes it. Prompts, answers and keys are not logged.
"""

import json
import logging
import sys
import time
from typing import TextIO


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str):
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(process: str, stream: TextIO | None = None) -> logging.Handler:
    """Send what PagedRay logs in this process, from INFO on, to `stream` (by default stderr, which Ray keeps)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    logger = logging.getLogger("pagedray")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler
