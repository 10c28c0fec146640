// The state timeline and the status history. Grafana draws these two in its application, not in its packages:
// these are our own boxes on Grafana's plot, with its axes, colours and legend.
import {
  FieldType,
  formattedValueToString,
  getFieldDisplayName,
  getValueFormat,
  outerJoinDataFrames,
} from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder, VizLayout, VizLegend } from '@grafana/ui';
import { useMemo } from 'react';
import uPlot from 'uplot';
import { BASE, configured } from '../fields.js';

const FALLBACK = { ...BASE, custom: { lineWidth: 0, fillOpacity: 70, spanNulls: false } };
const PADDING = 4;
const NARROWEST_NAME = 60;
const LAST_LABEL = 24;

/** A row as ranges of samples with the same appearance: `start` is the first, `end` the one after the last. */
function stretches(field, merge, span) {
  const found = [];
  let last;
  field.values.forEach((value, index) => {
    if (value === null || value === undefined) {
      last = span ? last : undefined;
      return;
    }
    const display = field.display(value);
    const same = merge && last && last.display.text === display.text && last.display.color === display.color;
    if (span && last) {
      last.end = index;
    }
    if (!same) {
      last = { start: index, display };
      found.push(last);
    }
    last.end = index + 1;
  });
  return found;
}

/** The ranges of several thresholds, which Grafana lists instead of values. */
function thresholdLegend({ thresholds, unit, decimals }, theme) {
  const text = (value) => formattedValueToString(getValueFormat(unit)(value, decimals));
  return thresholds.steps.map(({ value, color }, index) => ({
    label: index === 0 ? `< ${text(thresholds.steps[1].value)}` : `${text(value)}+`,
    color: theme.visualization.getColorByName(color),
    yAxis: 1,
  }));
}

function legendOf(fields, mappings, theme) {
  const { config } = fields[0];
  if (config.color?.mode === 'thresholds' && config.thresholds?.steps.length > 1) {
    return thresholdLegend(config, theme);
  }
  const order = new Map();
  for (const mapping of mappings ?? []) {
    const results = mapping.type === 'value' ? Object.values(mapping.options) : [mapping.options.result];
    const inTurn = [...results].sort((a, b) => (a.index ?? 0) - (b.index ?? 0));
    inTurn.forEach((result) => order.has(result.text) || order.set(result.text, order.size));
  }
  const items = new Map();
  for (const field of fields) {
    for (const value of new Set(field.values)) {
      if (value !== null && value !== undefined) {
        const display = field.display(value);
        const label = formattedValueToString(display);
        items.set(label, { label, color: display.color, yAxis: 1 });
      }
    }
  }
  return [...items.values()].sort((a, b) => (order.get(a.label) ?? order.size) - (order.get(b.label) ?? order.size));
}

function drawRow(u, { field, row, rows, theme, options, merge, interval }) {
  const { ctx, bbox } = u;
  const { fillOpacity, lineWidth, spanNulls } = field.config.custom;
  const tall = bbox.height / rows;
  const high = tall * (options.rowHeight ?? 0.9);
  const top = bbox.top + row * tall + (tall - high) / 2;
  const end = u.scales.x.max;
  for (const { start, end: after, display } of stretches(field, merge, Boolean(spanNulls))) {
    const until = Math.min(u.data[0][after] ?? u.data[0][after - 1] + interval, end);
    const left = Math.max(u.valToPos(u.data[0][start], 'x', true), bbox.left);
    const wide = Math.min(u.valToPos(until, 'x', true), bbox.left + bbox.width) - left - (merge ? 0 : 2);
    if (wide <= 0) {
      continue;
    }
    ctx.globalAlpha = (fillOpacity ?? 70) / 100;
    ctx.fillStyle = display.color;
    ctx.fillRect(left, top, wide, high);
    ctx.globalAlpha = 1;
    if (lineWidth) {
      ctx.strokeStyle = display.color;
      ctx.lineWidth = lineWidth * uPlot.pxRatio;
      ctx.strokeRect(left, top, wide, high);
    }
    const text = formattedValueToString(display);
    const gap = PADDING * uPlot.pxRatio;
    if (options.showValue !== 'never' && ctx.measureText(text).width + 2 * gap <= wide) {
      const centred = options.alignValue === 'center';
      ctx.textAlign = centred ? 'center' : 'left';
      ctx.fillStyle = theme.colors.getContrastText(display.color);
      ctx.fillText(text, centred ? left + wide / 2 : left + gap, top + high / 2);
    }
  }
}

function builderFor({ frame, names, theme, timeRange, options, merge }) {
  const builder = new UPlotConfigBuilder('utc');
  const fields = frame.fields.slice(1);
  const rows = fields.length;
  const at = frame.fields[0].values;
  const interval = frame.fields[0].config.interval ?? (at.length > 1 ? at[1] - at[0] : 0);
  builder.setPrepData(() => [at, ...fields.map((field) => field.values)]);
  builder.scaleKeys = ['x', 'y'];
  builder.setPadding([null, LAST_LABEL, null, null]);
  builder.addScale({
    scaleKey: 'x',
    isTime: true,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => [timeRange.from.valueOf(), timeRange.to.valueOf()],
  });
  builder.addScale({
    scaleKey: 'y',
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Down,
    range: () => [0, rows],
  });
  builder.addAxis({
    scaleKey: 'x',
    isTime: true,
    placement: AxisPlacement.Bottom,
    timeZone: 'utc',
    theme,
    grid: { show: true },
  });
  const axis = document.createElement('canvas').getContext('2d');
  axis.font = `12px ${theme.typography.fontFamily}`;
  const widest = Math.max(NARROWEST_NAME, ...names.map((name) => axis.measureText(name).width));
  builder.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    theme,
    grid: { show: false },
    ticks: { show: false },
    gap: 8,
    size: Math.ceil(widest) + 16,
    splits: names.map((_, row) => row + 0.5),
    values: names,
  });
  fields.forEach((field) =>
    builder.addSeries({
      scaleKey: 'y',
      theme,
      colorMode: { id: 'fixed' },
      lineColor: 'transparent',
      pathBuilder: () => null,
      pointsBuilder: () => undefined,
      showPoints: 'never',
      pointsFilter: () => null,
      show: true,
      drawStyle: 'line',
    })
  );
  builder.addHook('draw', (u) => {
    u.ctx.save();
    u.ctx.font = `${12 * uPlot.pxRatio}px ${theme.typography.fontFamily}`;
    u.ctx.textBaseline = 'middle';
    fields.forEach((field, row) => drawRow(u, { field, row, rows, theme, options, merge, interval }));
    u.ctx.restore();
  });
  return builder;
}

export function TimelinePanel({ panel, frames, theme, replace, timeRange, width, height }) {
  const options = panel.options ?? {};
  const merge = panel.type === 'state-timeline' && options.mergeValues !== false;
  const drawn = useMemo(() => {
    const data = configured({ panel, frames, theme, replace, fallback: FALLBACK });
    const rows = data.flatMap((frame) =>
      frame.fields
        .filter((field) => field.type !== FieldType.time)
        .map((field) => ({ field, name: getFieldDisplayName(field, frame, data) }))
    );
    const frame = data.length > 1 ? outerJoinDataFrames({ frames: data }) : data[0];
    if (!rows.length) {
      return null;
    }
    frame.fields.slice(1).forEach((field, row) => {
      field.display = rows[row].field.display;
      field.config = rows[row].field.config;
    });
    const builder = builderFor({ frame, names: rows.map((row) => row.name), theme, timeRange, options, merge });
    return {
      builder,
      data: builder.prepData([frame]),
      fields: frame.fields.slice(1),
      mappings: panel.fieldConfig?.defaults?.mappings,
    };
  }, [panel, frames]);
  if (!drawn) {
    return null;
  }
  const legend =
    options.legend?.showLegend === false ? null : (
      <VizLayout.Legend placement={options.legend?.placement ?? 'bottom'}>
        <VizLegend
          placement={options.legend?.placement ?? 'bottom'}
          items={legendOf(drawn.fields, drawn.mappings, theme)}
          displayMode="list"
        />
      </VizLayout.Legend>
    );
  return (
    <VizLayout width={width} height={height} legend={legend}>
      {(inner, tall) => <UPlotChart config={drawn.builder} data={drawn.data} width={inner} height={tall} />}
    </VizLayout>
  );
}
