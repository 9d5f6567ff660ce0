"""Federated learning itself: the round, the rule, what clients are told and answer, client rows, randomness."""
