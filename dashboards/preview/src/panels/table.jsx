import { TableNG } from '@grafana/ui/unstable';
import { BASE, configured } from '../fields.js';

const FALLBACK = { ...BASE, custom: { align: 'auto', cellOptions: { type: 'auto' }, inspect: false } };

export function TablePanel({ panel, frames, theme, replace, timeRange, width, height }) {
  const { frameIndex = 0, showHeader = true, cellHeight = 'sm', sortBy } = panel.options ?? {};
  const data = configured({ panel, frames, theme, replace, fallback: FALLBACK });
  if (!data.length) {
    return null;
  }
  return (
    <TableNG
      data={data[Math.min(frameIndex, data.length - 1)]}
      noHeader={!showHeader}
      sortBy={sortBy}
      cellHeight={cellHeight}
      timeRange={timeRange}
      fieldConfig={panel.fieldConfig}
      structureRev={1}
      showTypeIcons={false}
      resizable={false}
      enableVirtualization={false}
      width={width}
      height={height}
    />
  );
}
