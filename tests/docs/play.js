// What test_play.py runs in the page, before the page's own script.

const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));

/** Leave in the page all errors, and what a function returns. */
async function report(run, given) {
  const result = await run(given);
  const made = document.createElement("pre");
  made.id = "report";
  made.textContent = JSON.stringify([wrong, result]);
  document.body.append(made);
}

/** Compute all figures with all settings. */
function compute(all) {
  return all.map((s) => ({
    ring: course.ring(s.ranks),
    step: course.step(s),
    fit: course.fit(s),
    schedule: course.schedule(s.name, s.ranks, s.parts, s.backward),
  }));
}

/** Return the links found in files that a reader may choose. */
function links(files) {
  return files.map(course.readLink);
}
