"""Chat templates for checkpoints that have none, by the added tokens that their models know."""

from __future__ import annotations

from collections.abc import Set

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Ling's, which LLaDA2 keeps: the system's turn is always there, and ends with the thinking mode.
_ROLES = (
    "{{ '<role>SYSTEM</role>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}"
    "{{ 'detailed thinking off<|role_end|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set name = 'HUMAN' %}"
    "{% elif message['role'] == 'assistant' %}{% set name = 'ASSISTANT' %}"
    "{% else %}{% set name = 'SYSTEM' %}{% endif %}"
    "{% if not (loop.first and name == 'SYSTEM') %}"
    "{{ '<role>' + name + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
)


def usual_template(added: Set[str]) -> str | None:
    """added: their strings. None: they are of no layout that is known."""
    if {"<|im_start|>", "<|im_end|>"} <= added:
        return _CHATML
    return _ROLES if "<|role_end|>" in added else None
