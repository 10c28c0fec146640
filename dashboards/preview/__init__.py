"""Pictures of the committed boards, drawn by Grafana's own panel components from recorded answers of a Prometheus.

For development only: nothing of it is shipped.
"""
