// The type of a board's JSON, composed of the types of `@grafana/schema`. An object literal of this type has no field that
// the schema does not have, in the options of its panels and in the properties of its overrides too, where the schema's own
// `Dashboard` allows any.

import type * as schema from "@grafana/schema";
import type * as heatmap from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen";
import type * as stat from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type * as stateTimeline from "@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen";
import type * as statusHistory from "@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen";
import type * as table from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type * as timeSeries from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

/** T as JSON has it: the members of enumerations as their values. */
type Json<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends (infer Item)[]
      ? Json<Item>[]
      : T extends object
        ? { [Name in keyof T]: Json<T[Name]> }
        : T;

type FieldConfig<Custom> = Omit<schema.FieldConfig, "custom"> & { custom?: Custom };

type Property<Config> = {
  [Name in keyof Required<Config> & string]: { id: Name; value: Required<Config>[Name] };
}[keyof Required<Config> & string];

type CustomProperty<Custom> = {
  [Name in keyof Required<Custom> & string]: { id: `custom.${Name}`; value: Required<Custom>[Name] };
}[keyof Required<Custom> & string];

interface Override<Custom> {
  matcher: schema.MatcherConfig<string>;
  properties: (Property<Omit<FieldConfig<Custom>, "custom">> | CustomProperty<Custom>)[];
}

type Target = schema.DataQuery & Record<string, unknown>;

type PanelOf<Type extends string, Options, Custom> = Omit<
  schema.Panel,
  "type" | "options" | "fieldConfig" | "targets"
> & {
  type: Type;
  options: Options;
  fieldConfig: { defaults: FieldConfig<Custom>; overrides: Override<Custom>[] };
  targets: Target[];
};

type Panel =
  | PanelOf<"heatmap", heatmap.Options, heatmap.FieldConfig>
  | PanelOf<"stat", stat.Options, Record<string, never>>
  | PanelOf<"state-timeline", stateTimeline.Options, stateTimeline.FieldConfig>
  | PanelOf<"status-history", statusHistory.Options, statusHistory.FieldConfig>
  | PanelOf<"table", table.Options, table.FieldConfig>
  | PanelOf<"timeseries", timeSeries.Options, timeSeries.FieldConfig>;

/** What the Prometheus data source reads from an annotation; from Grafana 12 on, it moves `expr` and `step` to `target`. */
interface PrometheusAnnotation extends schema.AnnotationQuery {
  expr: string;
  step: string;
  titleFormat: string;
}

type RowPanel = Omit<schema.RowPanel, "panels"> & { panels: Panel[] };

export type Board = Json<
  Omit<schema.Dashboard, "panels" | "annotations"> & {
    panels: (Panel | RowPanel)[];
    annotations: { list: PrometheusAnnotation[] };
  }
>;
