// Which component draws which type of panel. A type that is not here fails the preview: a hole says nothing.
import { TablePanel } from './table.jsx';
import { TextPanel } from './text.jsx';
import { TimelinePanel } from './timeline.jsx';
import { TimeSeriesPanel } from './timeseries.jsx';
import { BarGaugePanel, StatPanel } from './values.jsx';

export const PANELS = {
  timeseries: TimeSeriesPanel,
  stat: StatPanel,
  bargauge: BarGaugePanel,
  table: TablePanel,
  'state-timeline': TimelinePanel,
  'status-history': TimelinePanel,
  text: TextPanel,
};
