"""Averaging of gradients: strategies plan schedules without ranks, averagers run what the ranks have agreed on."""
