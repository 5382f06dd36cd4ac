"""What policies keep: tasks with checkable answers, run through a daemon under budgets."""
