// What test_browser.py runs in a page, before the page's own script.

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

/** Return what cannot be seen on a page of slides. */
function unseen() {
  const found = [];
  document.querySelectorAll("section").forEach((slide, i) => {
    const all = slide.getBoundingClientRect();
    const scale = all.height / 720;
    for (const x of slide.querySelectorAll("*")) {
      const box = x.getBoundingClientRect();
      // The page number is in the lowest 40 pixels.
      const bottom = x.closest("header, footer") ? all.bottom : all.bottom - 40 * scale;
      const outside = box.left < all.left + 20 * scale || box.right > all.right - 20 * scale
        || box.top < all.top || box.bottom > bottom;
      const cut = x.scrollWidth > x.clientWidth + 1 && getComputedStyle(x).display === "block";
      if (outside || cut) found.push(`slide ${i + 1}: ${x.tagName} ${x.textContent.slice(0, 40)}`);
    }
  });
  return found;
}
