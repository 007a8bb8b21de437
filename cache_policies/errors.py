"""The error that a user of a policy meets."""


class PolicyError(ValueError):
    """A policy does not exist, does not compile or broke the contract; the message names the policy."""
