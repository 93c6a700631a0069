"""Pure decoding: state machines over token ids and statistics. No model, no engine, no device."""
