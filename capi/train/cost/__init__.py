"""What a run would cost, from its config alone: parameters, FLOP, memory, hours; and what to choose for some images."""
