// What marp reads by itself when it is called in this folder.

// Marp takes every HTML comment for a speaker note. The marks of the made parts are none.
function madeParts(md) {
  md.core.ruler.after("block", "made_parts", (state) => {
    for (const token of state.tokens) {
      if (token.type === "marpit_comment" && /^(begin|end)\b/.test(token.content)) {
        token.meta = { ...token.meta, marpitCommentParsed: "made part" };
      }
    }
  });
}

export default {
  engine: ({ marp }) => marp.use(madeParts),
  themeSet: "theme.css",
};
