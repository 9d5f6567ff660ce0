"""Engine `flower`: real devices over Flower. The server holds the algorithm; a client only follows briefs."""
