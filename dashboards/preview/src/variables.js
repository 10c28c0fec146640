// Replaces $name in titles and legends. Queries were recorded with their variables replaced.

const REFERENCE = /\$(\w+)|\$\{(\w+)(?::\w+)?\}|\[\[(\w+)\]\]/g;

export function replacer(variables) {
  return (text, scoped) =>
    String(text ?? '').replace(REFERENCE, (whole, plain, braced, square) => {
      const name = plain ?? braced ?? square;
      const value = scoped?.[name]?.value ?? variables[name]?.text;
      return value === undefined ? whole : String(value);
    });
}
