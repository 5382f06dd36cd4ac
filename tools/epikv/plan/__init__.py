"""How many replicas a workload needs: its requests, simulated on a model of the daemon that was fitted to one."""
