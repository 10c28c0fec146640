// The heat map of a histogram. Grafana draws it in its application, not in its packages: these are our own boxes on
// Grafana's plot. Prometheus' buckets are cumulative; a cell has what its bucket has more than the one below.
import { formattedValueToString, getValueFormat } from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder, VizLayout } from '@grafana/ui';
import { useMemo } from 'react';

const LAST_LABEL = 24;

const bound = (text) => (text === '+Inf' ? Infinity : Number(text));

/** The rows of cells, the lowest first. */
function rowsOf(frames) {
  const sorted = frames
    .map((frame) => ({ le: bound(frame.fields[1].labels.le), values: frame.fields[1].values }))
    .sort((a, b) => a.le - b.le);
  return sorted.map(({ le, values }, row) => ({
    le,
    values: values.map((value, index) => (value === null ? null : value - (sorted[row - 1]?.values[index] ?? 0))),
  }));
}

function drawCells(u, { rows, color, gap, least, theme }) {
  const { ctx, bbox } = u;
  const at = u.data[0];
  const largest = Math.max(...rows.flatMap(({ values }) => values));
  const tall = bbox.height / rows.length;
  ctx.save();
  ctx.fillStyle = theme.visualization.getColorByName(color.fill);
  rows.forEach(({ values }, row) =>
    values.forEach((value, index) => {
      if (value === null || value < least) {
        return;
      }
      const left = u.valToPos(at[index] - (at[1] - at[0]), 'x', true);
      const wide = u.valToPos(at[index], 'x', true) - left;
      ctx.globalAlpha = (value / largest) ** color.exponent;
      ctx.fillRect(left, bbox.top + bbox.height - (row + 1) * tall, wide - gap, tall - gap);
    })
  );
  ctx.restore();
}

function builderFor({ rows, options, theme, timeRange }) {
  const builder = new UPlotConfigBuilder('utc');
  const text = (le) =>
    le === Infinity ? '+Inf' : formattedValueToString(getValueFormat(options.yAxis.unit)(le, options.yAxis.decimals));
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
    direction: ScaleDirection.Up,
    range: () => [0, rows.length],
  });
  builder.addAxis({
    scaleKey: 'x',
    isTime: true,
    placement: AxisPlacement.Bottom,
    timeZone: 'utc',
    theme,
    grid: { show: false },
  });
  builder.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    theme,
    grid: { show: false },
    ticks: { show: false },
    splits: rows.map((_, row) => row + 1).filter((_, row) => (rows.length - 1 - row) % 2 === 0),
    values: rows.filter((_, row) => (rows.length - 1 - row) % 2 === 0).map(({ le }) => text(le)),
  });
  rows.forEach(() =>
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
  const { color, cellGap: gap = 1, filterValues } = options;
  builder.addHook('draw', (u) => drawCells(u, { rows, color, gap, least: filterValues?.le ?? 0, theme }));
  return builder;
}

export function HeatmapPanel({ panel, frames, theme, timeRange, width, height }) {
  const drawn = useMemo(() => {
    const rows = rowsOf(frames);
    const builder = builderFor({ rows, options: panel.options, theme, timeRange });
    return { builder, data: [frames[0].fields[0].values, ...rows.map(({ values }) => values)] };
  }, [panel, frames]);
  return (
    <VizLayout width={width} height={height}>
      {(inner, tall) => <UPlotChart config={drawn.builder} data={drawn.data} width={inner} height={tall} />}
    </VizLayout>
  );
}
