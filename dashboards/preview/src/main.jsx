// Draws window.preview = {board, recorded, width} and sets window.previewState when the page is complete: "done", or
// "failed: …". A panel that cannot be drawn as defined fails the whole page.
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';
import '@fontsource/inter/latin-600.css';
import '@fontsource/roboto-mono/latin-400.css';
import { createTheme } from '@grafana/data';
import { GlobalStyles, PortalContainer, ThemeContext } from '@grafana/ui';
import { flushSync } from 'react-dom';
import { createRoot } from 'react-dom/client';
import { framesOf } from './answers.js';
import { Board, panelsOf } from './board.jsx';
import { serveIcons } from './icons.js';
import { PANELS } from './panels/index.js';
import { replacer } from './variables.js';

const STILL_MS = 400;

function still() {
  return new Promise((resolve) => {
    let timer = setTimeout(resolve, STILL_MS);
    new MutationObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(resolve, STILL_MS);
    }).observe(document.body, { subtree: true, childList: true, attributes: true });
  });
}

async function draw({ board, recorded, width }) {
  serveIcons();
  await Promise.all(
    ['400 12px Inter', '500 12px Inter', '600 12px Inter', '400 12px "Roboto Mono"'].map((font) =>
      document.fonts.load(font)
    )
  );
  const replace = replacer(recorded.variables);
  const frames = new Map();
  for (const panel of panelsOf(board)) {
    if (panel.type !== 'row') {
      if (!PANELS[panel.type]) {
        throw new Error(`the preview cannot draw a panel of the type "${panel.type}" (${panel.title})`);
      }
      if (panel.repeat) {
        throw new Error(`the preview does not repeat panels (${panel.title})`);
      }
      frames.set(panel.id, await framesOf(panel, recorded, replace));
    }
  }
  const theme = createTheme({ colors: { mode: 'dark' } });
  document.body.style.background = theme.colors.background.canvas;
  const root = createRoot(document.getElementById('board'), {
    onUncaughtError: (error) => {
      window.previewState = `failed: ${error?.stack ?? error}`;
    },
  });
  flushSync(() =>
    root.render(
      <ThemeContext.Provider value={theme}>
        <GlobalStyles />
        <Board board={board} recorded={recorded} frames={frames} theme={theme} replace={replace} width={width} />
        <PortalContainer />
      </ThemeContext.Provider>
    )
  );
  await still();
  window.previewState ??= 'done';
}

/** For the browser, once the page is as high as the board: "done", or which panels are empty. */
window.previewFinished = async () => {
  await still();
  const empty = [...document.querySelectorAll('[data-panel] [data-testid="data-testid panel content"]')].filter(
    (content) => !content.querySelector('canvas') && !content.innerText.trim()
  );
  const titles = empty.map((content) => content.closest('[data-panel]').querySelector('h2')?.innerText);
  return titles.length ? `panels that are empty: ${titles.join(', ')}` : window.previewState;
};

draw(window.preview).catch((error) => {
  window.previewState = `failed: ${error?.stack ?? error}`;
});
