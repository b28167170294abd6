"""Every custom metric, declared once: its name, its vLLM name where the meaning is the same, and where it comes from.

docs/metrics.md repeats the table (`make generated`). Counters add up the very numbers that responses report in
`statistics`; histograms observe those responses' times.
"""

from kimi_backend.serving.metric_kinds import Metric
from kimi_backend.serving.metric_table.load import LOAD, RESPONSE_LAG, UPDATES
from kimi_backend.serving.metric_table.requests import REFUSED, REQUESTS
from kimi_backend.serving.metric_table.speculation import ACCEPT_LENGTH, SPECULATION
from kimi_backend.serving.metric_table.times import TIMES

__all__ = ["ACCEPT_LENGTH", "METRICS", "REFUSED", "RESPONSE_LAG", "UPDATES"]

METRICS: tuple[Metric, ...] = (*SPECULATION, *LOAD, *REQUESTS, *TIMES)
