// Units, thresholds, mappings, colours and overrides of the dashboard. Grafana's application registers the options of
// each panel type; here the registry contains the options that the dashboard uses.
import { FieldConfigOptionsRegistry, applyFieldOverrides, cacheFieldDisplayNames } from '@grafana/data';

const STANDARD = [
  'unit',
  'decimals',
  'min',
  'max',
  'fieldMinMax',
  'displayName',
  'description',
  'noValue',
  'mappings',
  'color',
  'links',
  'thresholds',
  'filterable',
];

// JSON has no -Infinity: the lowest step of a threshold is written as null.
function thresholds(value) {
  return value && { ...value, steps: value.steps.map((step) => ({ ...step, value: step.value ?? -Infinity })) };
}

function option(id, isCustom) {
  return {
    id: isCustom ? `custom.${id}` : id,
    path: id,
    name: id,
    isCustom,
    editor: () => null,
    override: () => null,
    process: id === 'thresholds' && !isCustom ? thresholds : (value) => value,
    shouldApply: () => true,
  };
}

function registryFor({ defaults, overrides }) {
  const custom = new Set(Object.keys(defaults.custom ?? {}));
  for (const { properties } of overrides) {
    for (const { id } of properties.filter((property) => property.id.startsWith('custom.'))) {
      custom.add(id.slice('custom.'.length));
    }
  }
  const options = [...STANDARD.map((id) => option(id, false)), ...[...custom].map((id) => option(id, true))];
  return new FieldConfigOptionsRegistry(() => options);
}

/** Frames with the panel's fieldConfig applied to each field; `fallback` contains the defaults of the panel type. */
export function configured({ panel, frames, theme, replace, fallback = {} }) {
  const own = panel.fieldConfig?.defaults ?? {};
  const source = {
    defaults: { ...fallback, ...own, custom: { ...fallback.custom, ...own.custom } },
    overrides: panel.fieldConfig?.overrides ?? [],
  };
  const data = applyFieldOverrides({
    data: frames,
    fieldConfig: source,
    fieldConfigRegistry: registryFor(source),
    replaceVariables: replace,
    theme,
    timeZone: 'utc',
  });
  cacheFieldDisplayNames(data);
  return data;
}

export const BASE = {
  color: { mode: 'thresholds' },
  thresholds: { mode: 'absolute', steps: [{ value: null, color: 'green' }] },
};
