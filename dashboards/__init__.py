"""What is shown of the metrics: Grafana boards, written as code so that they agree with each other and can be tested."""
