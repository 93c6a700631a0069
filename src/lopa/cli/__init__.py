"""The command line. Nothing here is imported by the rest of the package.

Modules import torch, and what needs it, inside the commands: `lopa --help` answers at once.
Standard output carries the answer and nothing else; progress, views and notes go to standard
error.
"""
