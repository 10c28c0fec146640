"""Pictures of the committed boards, drawn by Grafana's own panel components from recorded Prometheus responses.

For development only; not shipped.
"""
