"""Custom resources of a cluster."""

DRIVER_RESOURCE = "trial_driver"  # held by trials that only drive a worker group
