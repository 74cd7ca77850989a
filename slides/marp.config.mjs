// What marp reads by itself when it is called in this folder.

// Marp takes every HTML comment for a speaker note. The marks of blocks and values are none.
function marks(md) {
  md.core.ruler.after("inline", "marks", (state) => {
    for (const token of state.tokens.flatMap((token) => [token, ...(token.children ?? [])])) {
      if (token.type === "marpit_comment" && /^(begin .*|end|n \S+|\/n)$/.test(token.content)) {
        token.meta = { ...token.meta, marpitCommentParsed: "mark" };
      }
    }
  });
}

// ```console {2,5} highlights lines 2 and 5 of the block.
function highlightLines(marp) {
  const highlighter = marp.highlighter.bind(marp);
  marp.highlighter = (code, language, attributes) => {
    const html = highlighter(code, language, attributes) || marp.markdown.utils.escapeHtml(code);
    const numbers = (attributes ?? "").match(/\d+/g) ?? [];
    const lines = html.split("\n");
    for (const number of numbers) {
      lines[number - 1] = `<mark>${lines[number - 1]}</mark>`;
    }
    return lines.join("\n");
  };
}

export default {
  engine: ({ marp }) => {
    highlightLines(marp);
    return marp.use(marks);
  },
  themeSet: ["theme.css", "cheatsheet.css"],
};
