// Recorded answers of Prometheus as Grafana's data frames, shaped as its Prometheus data source shapes them:
// a frame for each series, or one table for each query.
import {
  FieldType,
  createDataFrame,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

// One of them is listed twice, under an old name.
const KNOWN = new Map(Object.values(standardTransformers).map((transformation) => [transformation.id, transformation]));
standardTransformersRegistry.setInit(() =>
  [...KNOWN.values()].map((transformation) => ({
    id: transformation.id,
    name: transformation.name,
    transformation: async () => transformation,
    editor: () => null,
  }))
);

const WRITTEN = { '+Inf': Infinity, '-Inf': -Infinity, NaN: NaN };
const number = (value) => (typeof value === 'string' ? WRITTEN[value] : value);

function times(answer) {
  const count = answer.series[0]?.values.length ?? 0;
  return Array.from({ length: count }, (_, index) => Math.round((answer.start + index * answer.step) * 1000));
}

function legend(target, labels) {
  const form = target.legendFormat;
  if (form && form !== '__auto') {
    return form.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
  }
  const { __name__: name = '', ...rest } = labels;
  const pairs = Object.entries(rest).map(([key, value]) => `${key}="${value}"`);
  return pairs.length || name ? `${name}${pairs.length ? `{${pairs.join(', ')}}` : ''}` : target.refId;
}

function series(target, answer) {
  const at = times(answer);
  return answer.series.map(({ labels, values }) =>
    createDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: at, config: { interval: answer.step * 1000 } },
        {
          name: 'Value',
          type: FieldType.number,
          labels,
          values: values.map(number),
          config: { displayNameFromDS: legend(target, labels) },
        },
      ],
    })
  );
}

function table(target, answer, alone) {
  const at = times(answer);
  const rows = answer.series.flatMap(({ labels, values }) =>
    values
      .map((value, index) => ({ labels, value: number(value), time: at[index] }))
      .filter((row) => row.value !== null)
  );
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.labels)))].sort();
  return createDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: rows.map((row) => row.time), config: {} },
      ...names.map((name) => ({
        name,
        type: FieldType.string,
        values: rows.map((row) => row.labels[name] ?? ''),
        config: { filterable: true },
      })),
      {
        name: alone ? 'Value' : `Value #${target.refId}`,
        type: FieldType.number,
        values: rows.map((row) => row.value),
        config: {},
      },
    ],
  });
}

/** The frames of a panel after its transformations. Throws where a query of the panel was not recorded. */
export async function framesOf(panel, recorded, replace) {
  const targets = (panel.targets ?? []).filter((target) => !target.hide);
  const tables = targets.filter((target) => target.format === 'table').length;
  const frames = targets.flatMap((target) => {
    const answer = recorded.panels[String(panel.id)]?.[target.refId];
    if (!answer) {
      throw new Error(`query ${target.refId} of panel ${panel.id} was not recorded`);
    }
    if (target.format !== 'table') {
      return series(target, answer);
    }
    return answer.series.length ? [table(target, answer, tables === 1)] : [];
  });
  const steps = (panel.transformations ?? []).filter((step) => !step.disabled);
  const unknown = steps.find((step) => !standardTransformersRegistry.getIfExists(step.id));
  if (unknown) {
    throw new Error(`the preview has no transformation "${unknown.id}"`);
  }
  return steps.length ? lastValueFrom(transformDataFrame(steps, frames, { interpolate: replace })) : frames;
}
