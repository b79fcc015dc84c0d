"""What named instance types cost: list prices, written down by hand, for estimates alone.

US dollars an hour, Linux, on demand, AWS us-west-2 (Oregon) and Google Cloud us-central1 (Iowa). Written down by hand
on 2026-12-02, not fetched from the vendors' price pages: look there before you rely on a sum. They change, differ by
region and leave out taxes, traffic and discounts. Spot prices move by the hour: a share of the list price is taken.
"""

from __future__ import annotations

DATE = "2026-12-02"
REGIONS = {"aws": "us-west-2", "gcp": "us-central1"}

ON_DEMAND: dict[str, dict[str, float]] = {
    "aws": {
        "m7i.large": 0.1008,
        "m7i.xlarge": 0.2016,
        "c7i.xlarge": 0.1785,
        "c7i.2xlarge": 0.357,
        "c7i.4xlarge": 0.714,
        "c7i.8xlarge": 1.428,
        "g6.xlarge": 0.8048,
        "g6.2xlarge": 0.9776,
    },
    "gcp": {
        "n2-standard-2": 0.0971,
        "n2-standard-8": 0.3885,
        "c3-standard-8": 0.4176,
        "g2-standard-8": 0.8536,
    },
}
SPOT_SHARE = 0.45  # of the list price
DISK_GB_MONTH = {"aws": 0.08, "gcp": 0.10}  # gp3, pd-balanced
HOURS_A_MONTH = 730.0


def disk_per_hour(provider: str, gigabytes: float) -> float:
    return gigabytes * DISK_GB_MONTH[provider] / HOURS_A_MONTH
