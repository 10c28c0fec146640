// The component that draws each panel type. A missing type fails the preview: a gap in the picture would go unnoticed.
import { HeatmapPanel } from './heatmap.jsx';
import { TablePanel } from './table.jsx';
import { TextPanel } from './text.jsx';
import { TimelinePanel } from './timeline.jsx';
import { TimeSeriesPanel } from './timeseries.jsx';
import { BarGaugePanel, StatPanel } from './values.jsx';

export const PANELS = {
  timeseries: TimeSeriesPanel,
  heatmap: HeatmapPanel,
  stat: StatPanel,
  bargauge: BarGaugePanel,
  table: TablePanel,
  'state-timeline': TimelinePanel,
  'status-history': TimelinePanel,
  text: TextPanel,
};
