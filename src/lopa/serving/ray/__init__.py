"""Replicas over a Ray cluster, behind one gateway: `serve run lopa.serving.ray:app`."""

from lopa.serving.ray.deployment import app as app
