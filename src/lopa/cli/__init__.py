"""The command line. Nothing here is imported by the rest of the package.

Modules import torch, and what needs it, inside the commands, so that `lopa --help` is fast. The
text that a model generates goes to standard output; progress, views and notes to standard error.
"""
