// Bundles the page into build/: one script and one style sheet that a file:// page can load.
import { build } from 'esbuild';
import { readFile } from 'node:fs/promises';
import path from 'node:path';

const here = import.meta.dirname;

// A style sheet names each font twice, once for browsers of ten years ago; and its addresses would be relative to it.
const fonts = {
  name: 'fonts',
  setup(context) {
    context.onLoad({ filter: /@fontsource.*\.css$/ }, async ({ path: file }) => {
      const text = await readFile(file, 'utf8');
      return { contents: text.replace(/,\s*url\([^)]*\.woff\) format\('woff'\)/g, ''), loader: 'css' };
    });
  },
};

await build({
  absWorkingDir: here,
  entryPoints: { preview: 'src/main.jsx' },
  outdir: 'build',
  bundle: true,
  minify: true,
  format: 'iife',
  target: 'chrome120',
  jsx: 'automatic',
  alias: { 'react-router-dom-v5-compat': 'react-router-dom' },
  nodePaths: [path.join(here, 'node_modules')],
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}' },
  loader: { '.ttf': 'dataurl', '.woff2': 'dataurl', '.svg': 'text' },
  plugins: [fonts],
  logLevel: 'warning',
});
