"""Runners: what executes plans on a device."""
