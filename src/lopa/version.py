"""The version, apart from the package so that a build can read it without importing torch."""

VERSION = "0.2.0"
