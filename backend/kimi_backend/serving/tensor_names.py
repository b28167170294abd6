"""Every tensor name of the three models, once. docs/protocol.md gives their meaning; a test compares all copies."""

# kimi_target and eagle3_draft
SECRET = "SECRET"
PLAN = "PLAN"
DESCRIBE = "DESCRIBE"
NEXT_PLAN = "NEXT_PLAN"
STEP = "STEP"
REPLY = "REPLY"
AUX_HIDDEN_STATES = "AUX_HIDDEN_STATES"
DESCRIPTION = "DESCRIPTION"
AUX_BUFFER = "AUX_BUFFER"
STEP_BOARD = "STEP_BOARD"
