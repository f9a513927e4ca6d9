"""What the agents' drivers ask, and what the script replies.  Stdlib only: drivers run in their own environments."""

# In the order of a conversation.
RUN, AGAIN, ENDLESS = "Run the command of the test.", "What did the command print?", "Write without end."
MAKE = "Make the file of the test."
LONG, TURNS = "Run the command of the test fifty times.", 50
COMMAND = "echo printed-$((40 + 2))"  # so that only a shell can have written the result
PRINTED = "printed-42"
PREFACE = "I run the command."
REPORTED, REMEMBERED = f"The command printed: {PRINTED}.", f"Before, it printed: {PRINTED}."
WRITTEN = "written.txt"
ENVELOPE = ("*** Begin Patch\n", "*** End Patch\n")
PATCH = f"*** Add File: {WRITTEN}\n+{PRINTED}\n".join(ENVELOPE)
