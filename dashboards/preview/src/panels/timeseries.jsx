import { FieldType, getFieldDisplayName } from '@grafana/data';
import { TimeSeries } from '@grafana/ui';
import { configured } from '../fields.js';

const FALLBACK = {
  color: { mode: 'palette-classic' },
  thresholds: { mode: 'absolute', steps: [{ value: null, color: 'green' }] },
  custom: {
    drawStyle: 'line',
    lineInterpolation: 'linear',
    barAlignment: 0,
    lineWidth: 1,
    fillOpacity: 0,
    gradientMode: 'none',
    spanNulls: false,
    showPoints: 'auto',
    pointSize: 5,
    stacking: { mode: 'none', group: 'A' },
    axisPlacement: 'auto',
    axisLabel: '',
    axisColorMode: 'text',
    axisBorderShow: false,
    scaleDistribution: { type: 'linear' },
    thresholdsStyle: { mode: 'off' },
  },
};

// A value that is not a number, such as a quantile without samples, is a gap.
function plotted(frame) {
  const finite = (field) => ({
    ...field,
    values: field.values.map((value) => (Number.isFinite(value) ? value : null)),
  });
  return { ...frame, fields: frame.fields.map((field) => (field.type === FieldType.number ? finite(field) : field)) };
}

// The plot's join drops display names, which select the colours: so the fields themselves carry them.
function named(frame, data) {
  const bearing = (field) =>
    field.type === FieldType.time ? field : { ...field, name: getFieldDisplayName(field, frame, data) };
  return { ...frame, fields: frame.fields.map(bearing) };
}

export function TimeSeriesPanel({ panel, frames, theme, replace, timeRange, width, height }) {
  const legend = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...panel.options?.legend };
  const data = configured({ panel, frames: frames.map(plotted), theme, replace, fallback: FALLBACK });
  return (
    <TimeSeries
      frames={data.map((frame) => named(frame, data))}
      structureRev={1}
      width={width}
      height={height}
      timeRange={timeRange}
      timeZone="utc"
      legend={legend}
      options={panel.options}
    />
  );
}
