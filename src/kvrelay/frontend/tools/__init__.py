"""Function calls and reasoning in a model's text: what is written, read back as it comes, and made sure of by grammar.

tools, tool_choice ──definitions──> ToolPlan ──grammar──> Constraint          what the answer must look like
messages with calls ──histories──> messages for the chat template
text ──reasoning──> text ──parsing──> content, calls                          pure and incremental: text in, deltas out
"""
