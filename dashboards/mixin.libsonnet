// The dashboards, recording rules and alerts as a mixin, in the fields that kubernetes-mixin and its tools use.
// jb install PATH-OF-THIS-REPOSITORY/dashboards; docs/dashboards.md#as-a-mixin
{
  _config+:: {
    // The address of the pages of docs/runbooks.
    runbooks: 'docs/runbooks',
    // Shares of good events: responses within ten seconds, and scrubs that pass.
    objectives: { handover: 0.99, scrub: 0.999 },
  },

  local config = self._config,
  local base = std.rstripChars(config.runbooks, '/'),
  local replaced(text, pairs) = std.foldl(function(t, pair) std.strReplace(t, pair[0], pair[1]), pairs, text),
  local rules(text) = std.parseYaml(replaced(text, [
    ['runbook_url: docs/runbooks/', 'runbook_url: %s/' % base],
    ['(1 - 0.99)', '(1 - %g)' % config.objectives.handover],
    ['(1 - 0.999)', '(1 - %g)' % config.objectives.scrub],
  ])).groups,
  local board(text) = std.parseJson(std.strReplace(text, '"query": "docs/runbooks"', '"query": "%s"' % base)),

  grafanaDashboards+:: {
    'scrubber-fleet.json': board(importstr 'fleet.json'),
    'scrubber-node.json': board(importstr 'node.json'),
    'scrubber-device.json': board(importstr 'device.json'),
  },
  prometheusRules+:: {
    groups+: rules(importstr 'rules/recording.yaml') + rules(importstr 'rules/joins.yaml'),
  },
  prometheusAlerts+:: {
    groups+: rules(importstr 'rules/alerts.yaml') + rules(importstr 'rules/slo.yaml'),
  },
}
