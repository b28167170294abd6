"""The engine: schedule, verify, emit, draft, for all running requests together."""
