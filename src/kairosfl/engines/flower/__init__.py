"""Engine `flower`: real devices over Flower.

The algorithm runs on the server; a client only follows briefs.
"""
