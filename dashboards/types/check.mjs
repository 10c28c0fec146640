// Checks the boards' JSON against the types of `@grafana/schema`, once for each `grafana-schema-N` of package.json.
//
//     node check.mjs [FILE ...]        # default: the committed boards

import { readFileSync } from "node:fs";
import { basename, dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";

const HERE = dirname(fileURLToPath(import.meta.url));
const COMMITTED = ["fleet", "node", "device"].map((name) => join(HERE, "..", `${name}.json`));
const { dependencies } = JSON.parse(readFileSync(join(HERE, "package.json"), "utf8"));

/** Where a version of the schema has its types. */
function typesOf(schema) {
  const at = join(HERE, "node_modules", schema);
  const { types, exports } = JSON.parse(readFileSync(join(at, "package.json"), "utf8"));
  return join(at, types ?? exports["."].types);
}

/** A board as an object literal, whose values keep their exact types, with the line numbers of its file. */
function literal(file) {
  const board = readFileSync(file, "utf8").trimEnd();
  return `import type { Board } from "./board"; export const board: Board = ${board};\n`;
}

function check(schema, files) {
  const sources = new Map(files.map((file) => [join(HERE, `${basename(file)}.ts`), file]));
  const options = {
    strict: true,
    noEmit: true,
    target: ts.ScriptTarget.ES2022,
    module: ts.ModuleKind.ESNext,
    moduleResolution: ts.ModuleResolutionKind.Bundler,
    types: [],
    paths: {
      "@grafana/schema": [typesOf(schema)],
      "@grafana/schema/dist/esm/*": [join(HERE, "node_modules", schema, "dist/esm/*")],
    },
  };
  const host = ts.createCompilerHost(options);
  const { fileExists, readFile, getSourceFile } = host;
  host.fileExists = (name) => sources.has(name) || fileExists(name);
  host.readFile = (name) => (sources.has(name) ? literal(sources.get(name)) : readFile(name));
  host.getSourceFile = (name, languageVersion, ...rest) =>
    sources.has(name)
      ? ts.createSourceFile(name, literal(sources.get(name)), languageVersion)
      : getSourceFile(name, languageVersion, ...rest);
  const program = ts.createProgram([...sources.keys(), join(HERE, "rejected.ts")], options, host);
  const errors = ts.getPreEmitDiagnostics(program);
  for (const { file, start, messageText } of errors) {
    const line = file ? file.getLineAndCharacterOfPosition(start).line + 1 : 0;
    const name = file ? (sources.get(file.fileName) ?? file.fileName) : "";
    console.error(`${schema}: ${name}:${line}: ${ts.flattenDiagnosticMessageText(messageText, "\n  ")}`);
  }
  const { version } = JSON.parse(readFileSync(join(HERE, "node_modules", schema, "package.json"), "utf8"));
  console.log(`@grafana/schema ${version}: ${errors.length} errors in ${files.length} dashboards`);
  return errors.length;
}

const files = process.argv.length > 2 ? process.argv.slice(2).map((each) => resolve(each)) : COMMITTED;
const schemas = Object.keys(dependencies).filter((name) => name.startsWith("grafana-schema-"));
const errors = schemas.map((schema) => check(schema, files));
process.exitCode = errors.some((count) => count > 0) ? 1 : 0;
