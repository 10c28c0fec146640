// The board's frame: its title, variables, links and time range above Grafana's grid of 24 columns.
import { dateTime, dateTimeFormat } from '@grafana/data';
import { Icon, PanelChrome } from '@grafana/ui';
import { PANELS } from './panels/index.js';

const COLUMNS = 24;
const CELL = 30;
const GAP = 8;
const EDGE = 16;
const HEADER = 92;

/** All panels in reading order; those of a collapsed row are expanded, and panels below move down. */
export function panelsOf(board) {
  return board.panels.flatMap((panel) => (panel.type === 'row' ? [panel, ...(panel.panels ?? [])] : [panel]));
}

export function heightOf(board) {
  const rows = Math.max(...panelsOf(board).map(({ gridPos }) => gridPos.y + gridPos.h));
  return HEADER + rows * (CELL + GAP) + EDGE;
}

function place({ x, y, w, h }, width) {
  const column = (width - 2 * EDGE - GAP * (COLUMNS - 1)) / COLUMNS;
  return {
    left: Math.round(EDGE + x * (column + GAP)),
    top: HEADER + y * (CELL + GAP),
    width: Math.round(w * column + (w - 1) * GAP),
    height: h * CELL + (h - 1) * GAP,
  };
}

function Header({ board, recorded, theme, timeRange }) {
  const box = {
    display: 'inline-flex',
    alignItems: 'center',
    height: 32,
    padding: '0 8px',
    fontSize: 14,
    border: `1px solid ${theme.colors.border.medium}`,
    whiteSpace: 'nowrap',
  };
  const shown = (board.templating?.list ?? []).filter(
    (variable) => variable.hide !== 2 && recorded.variables[variable.name]
  );
  const time = (value) => dateTimeFormat(value, { timeZone: 'utc', format: 'YYYY-MM-DD HH:mm:ss' });
  return (
    <div style={{ position: 'absolute', left: EDGE, right: EDGE, top: 12 }}>
      <div style={{ display: 'flex', alignItems: 'center', gap: 8, marginBottom: 8 }}>
        <Icon name="apps" size="lg" />
        <h1 style={{ fontSize: 18, margin: 0, fontWeight: 500, flexGrow: 1 }}>{board.title}</h1>
        {(board.links ?? []).map((link) => (
          <span key={link.title} style={{ ...box, gap: 6, borderRadius: 2, background: theme.colors.secondary.main }}>
            <Icon name={link.type === 'dashboards' ? 'apps' : 'external-link-alt'} /> {link.title}
          </span>
        ))}
        <span style={{ ...box, gap: 6, borderRadius: 2, background: theme.colors.secondary.main }}>
          <Icon name="clock-nine" /> {time(timeRange.from)} to {time(timeRange.to)} UTC
        </span>
      </div>
      <div style={{ display: 'flex', gap: 8 }}>
        {shown.map((variable) => (
          <span key={variable.name} style={{ display: 'flex' }}>
            <span style={{ ...box, background: theme.colors.background.secondary, fontSize: 12, fontWeight: 500 }}>
              {variable.label || variable.name}
            </span>
            <span style={{ ...box, background: theme.components.input.background, borderLeft: 'none' }}>
              {recorded.variables[variable.name].text}
            </span>
          </span>
        ))}
      </div>
    </div>
  );
}

function Row({ title, at }) {
  return (
    <div style={{ position: 'absolute', ...at, display: 'flex', alignItems: 'center', gap: 8, fontWeight: 500 }}>
      <Icon name="angle-down" /> {title}
    </div>
  );
}

export function Board({ board, recorded, frames, theme, replace, width }) {
  const from = dateTime(recorded.from * 1000);
  const to = dateTime(recorded.to * 1000);
  const timeRange = { from, to, raw: { from, to } };
  return (
    <div style={{ position: 'relative', width, height: heightOf(board), background: theme.colors.background.canvas }}>
      <Header board={board} recorded={recorded} theme={theme} timeRange={timeRange} />
      {panelsOf(board).map((panel) => {
        const at = place(panel.gridPos, width);
        if (panel.type === 'row') {
          return <Row key={panel.id} title={replace(panel.title)} at={at} />;
        }
        const Panel = PANELS[panel.type];
        const given = { panel, frames: frames.get(panel.id), theme, replace, timeRange };
        return (
          <div key={panel.id} data-panel={panel.id} style={{ position: 'absolute', ...at }}>
            <PanelChrome
              title={replace(panel.title)}
              description={panel.description}
              displayMode={panel.transparent ? 'transparent' : 'default'}
              padding={panel.type === 'table' ? 'none' : 'md'}
              width={at.width}
              height={at.height}
            >
              {(inner, tall) =>
                given.frames.length || panel.type === 'text' ? (
                  <Panel {...given} width={inner} height={tall} />
                ) : (
                  <div
                    style={{ display: 'grid', placeItems: 'center', height: tall, color: theme.colors.text.secondary }}
                  >
                    {panel.fieldConfig?.defaults?.noValue ?? 'No data'}
                  </div>
                )
              }
            </PanelChrome>
          </div>
        );
      })}
    </div>
  );
}
