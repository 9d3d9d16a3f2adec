"""What the file is called that holds an adapter's signature (`signing`): beside it, whatever the source."""

#: In a PEFT folder.
SIGNATURE_NAME = "adapter.sig"
#: After the name of a card.
SIGNATURE_SUFFIX = ".sig"
