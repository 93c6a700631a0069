"""What the fragile worker cannot stand, and the files that tell it what to do."""

DEADLY, FAULTY = 250, 251  # tokens: the process dies, or the round fails
PANIC = "panic"  # text on which the tokenizer panics
HELD = "held"  # text whose encoding waits until there is a file `go`
SHORT = 20  # characters of a short prompt
FOLDER = "LOPA_TEST_FOLDER"  # variable: where the files are
# go      encoding of HELD goes on
# stuck   rounds wait while it is there
# starts  how many more starts fail
