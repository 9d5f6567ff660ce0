"""Federated learning itself: rounds, rules, what clients are told and what they report, client
rows, randomness.
"""
