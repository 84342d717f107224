"""The version that both ends of every connection compare."""

VERSION = "0.1.0"

# Raised whenever a message or frame changes meaning. Peers with another number are refused at enrolment.
PROTOCOL = 12
