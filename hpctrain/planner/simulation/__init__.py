"""The simulation of a step by discrete events: the tasks of all ranks, the schedules of their averagers, cores and links."""
