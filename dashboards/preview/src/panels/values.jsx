// Numbers: the stat panel and the bar gauge.
import { VizOrientation, getDisplayValueAlignmentFactors, getFieldDisplayValues } from '@grafana/data';
import { BarGauge, BigValue, VizRepeater } from '@grafana/ui';
import { BASE, configured } from '../fields.js';

function repeated({ panel, frames, theme, replace, width, height }, fallback, sparkline, more, renderValue) {
  const { orientation = VizOrientation.Auto, reduceOptions } = panel.options ?? {};
  const data = configured({ panel, frames, theme, replace, fallback });
  return (
    <VizRepeater
      getValues={() =>
        getFieldDisplayValues({
          data,
          fieldConfig: { defaults: panel.fieldConfig?.defaults ?? {}, overrides: [] },
          reduceOptions: { values: false, calcs: ['lastNotNull'], fields: '', ...reduceOptions },
          replaceVariables: replace,
          sparkline,
          theme,
          timeZone: 'utc',
        })
      }
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={renderValue}
      source={data}
      renderCounter={0}
      orientation={orientation}
      width={width}
      height={height}
      {...more}
    />
  );
}

export function StatPanel(props) {
  const options = {
    colorMode: 'value',
    graphMode: 'area',
    justifyMode: 'auto',
    textMode: 'auto',
    ...props.panel.options,
  };
  const render = ({ value: { display, sparkline }, alignmentFactors, width, height, count }) => (
    <BigValue
      value={display}
      sparkline={sparkline && { ...sparkline, timeRange: props.timeRange }}
      count={count}
      colorMode={options.colorMode}
      graphMode={options.graphMode}
      justifyMode={options.justifyMode}
      textMode={options.textMode}
      alignmentFactors={alignmentFactors}
      text={options.text}
      disableWideLayout={options.wideLayout === false}
      width={width}
      height={height}
      theme={props.theme}
    />
  );
  return repeated(props, BASE, options.graphMode !== 'none', { itemSpacing: 3, autoGrid: true }, render);
}

export function BarGaugePanel(props) {
  const options = {
    displayMode: 'gradient',
    showUnfilled: true,
    minVizWidth: 8,
    minVizHeight: 16,
    valueMode: 'color',
    namePlacement: 'auto',
    ...props.panel.options,
  };
  const render = ({ value: { display, field, view, colIndex }, alignmentFactors, orientation, width, height }) => (
    <BarGauge
      value={display}
      field={field}
      display={view?.getFieldDisplayProcessor(colIndex ?? 0) ?? field.display}
      alignmentFactors={alignmentFactors}
      orientation={orientation}
      displayMode={options.displayMode}
      showUnfilled={options.showUnfilled}
      valueDisplayMode={options.valueMode}
      namePlacement={options.namePlacement}
      text={options.text}
      itemSpacing={8}
      lcdCellWidth={12}
      width={width}
      height={height}
      theme={props.theme}
    />
  );
  const sizes = {
    itemSpacing: 8,
    minVizWidth: options.minVizWidth,
    minVizHeight: options.minVizHeight,
    maxVizHeight: 300,
  };
  return repeated(props, BASE, false, sizes, render);
}
