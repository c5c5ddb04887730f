"""Function calls and reasoning in a model's text: rendered into prompts, parsed from streams, and enforced by
grammars.

tools, tool_choice ──definitions──> ToolCalling ──grammar──> Constraint       the required form of the answer
messages with calls ──histories──> messages for the chat template
text ──reasoning──> text ──parsing──> content, calls                          pure and incremental: text in, deltas out
"""
