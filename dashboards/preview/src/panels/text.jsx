import { renderMarkdown } from '@grafana/data';

export function TextPanel({ panel, replace }) {
  const { content = '', mode = 'markdown' } = panel.options ?? {};
  const text = replace(content);
  return (
    <div
      className="markdown-html"
      dangerouslySetInnerHTML={{ __html: mode === 'html' ? text : renderMarkdown(text) }}
    />
  );
}
