"""What a run needs besides the weight sync: learning step, task, engine actor, run folder, Ray session."""
